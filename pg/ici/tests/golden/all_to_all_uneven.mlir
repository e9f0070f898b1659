module @all_to_all_uneven attributes {mhlo.num_partitions = 1 : i32, mhlo.num_replicas = 2 : i32} {
  func.func public @main(%arg0: tensor<3x8x128xui32>, %arg1: tensor<2xi32>, %arg2: tensor<2xi32>) -> (tensor<3x8x128xui32>) {
    %0 = stablehlo.constant dense<0> : tensor<1x8x128xui32>
    %1 = stablehlo.concatenate %arg0, %0, dim = 0 : (tensor<3x8x128xui32>, tensor<1x8x128xui32>) -> tensor<4x8x128xui32>
    %2 = stablehlo.slice %arg1 [0:1] : (tensor<2xi32>) -> tensor<1xi32>
    %3 = stablehlo.reshape %2 : (tensor<1xi32>) -> tensor<i32>
    %4 = stablehlo.constant dense<0> : tensor<i32>
    %5 = stablehlo.dynamic_slice %1, %3, %4, %4, sizes = [1, 8, 128] : (tensor<4x8x128xui32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x8x128xui32>
    %6 = stablehlo.slice %arg1 [1:2] : (tensor<2xi32>) -> tensor<1xi32>
    %7 = stablehlo.reshape %6 : (tensor<1xi32>) -> tensor<i32>
    %8 = stablehlo.constant dense<0> : tensor<i32>
    %9 = stablehlo.dynamic_slice %1, %7, %8, %8, sizes = [1, 8, 128] : (tensor<4x8x128xui32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x8x128xui32>
    %10 = stablehlo.concatenate %5, %9, dim = 0 : (tensor<1x8x128xui32>, tensor<1x8x128xui32>) -> tensor<2x8x128xui32>
    %11 = "stablehlo.all_to_all"(%10) {split_dimension = 0 : i64, concat_dimension = 0 : i64, split_count = 2 : i64, replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>} : (tensor<2x8x128xui32>) -> tensor<2x8x128xui32>
    %12 = stablehlo.constant dense<0> : tensor<4x8x128xui32>
    %13 = stablehlo.slice %arg2 [0:1] : (tensor<2xi32>) -> tensor<1xi32>
    %14 = stablehlo.reshape %13 : (tensor<1xi32>) -> tensor<i32>
    %15 = stablehlo.slice %11 [0:1, 0:8, 0:128] : (tensor<2x8x128xui32>) -> tensor<1x8x128xui32>
    %16 = stablehlo.constant dense<0> : tensor<i32>
    %17 = stablehlo.dynamic_update_slice %12, %15, %14, %16, %16 : (tensor<4x8x128xui32>, tensor<1x8x128xui32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<4x8x128xui32>
    %18 = stablehlo.slice %arg2 [1:2] : (tensor<2xi32>) -> tensor<1xi32>
    %19 = stablehlo.reshape %18 : (tensor<1xi32>) -> tensor<i32>
    %20 = stablehlo.slice %11 [1:2, 0:8, 0:128] : (tensor<2x8x128xui32>) -> tensor<1x8x128xui32>
    %21 = stablehlo.constant dense<0> : tensor<i32>
    %22 = stablehlo.dynamic_update_slice %17, %20, %19, %21, %21 : (tensor<4x8x128xui32>, tensor<1x8x128xui32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<4x8x128xui32>
    %23 = stablehlo.slice %22 [0:3, 0:8, 0:128] : (tensor<4x8x128xui32>) -> tensor<3x8x128xui32>
    return %23 : tensor<3x8x128xui32>
  }
}
