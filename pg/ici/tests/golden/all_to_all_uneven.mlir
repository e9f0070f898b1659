module @all_to_all_uneven attributes {mhlo.num_partitions = 1 : i32, mhlo.num_replicas = 2 : i32} {
  func.func public @main(%arg0: tensor<2048xui16>, %arg1: tensor<2xi32>, %arg2: tensor<2xi32>) -> (tensor<2048xui16>) {
    %0 = stablehlo.constant dense<0> : tensor<2048xui16>
    %1 = stablehlo.concatenate %arg0, %0, dim = 0 : (tensor<2048xui16>, tensor<2048xui16>) -> tensor<4096xui16>
    %2 = stablehlo.slice %arg1 [0:1] : (tensor<2xi32>) -> tensor<1xi32>
    %3 = stablehlo.reshape %2 : (tensor<1xi32>) -> tensor<i32>
    %4 = stablehlo.dynamic_slice %1, %3, sizes = [2048] : (tensor<4096xui16>, tensor<i32>) -> tensor<2048xui16>
    %5 = stablehlo.reshape %4 : (tensor<2048xui16>) -> tensor<1x16x128xui16>
    %6 = stablehlo.slice %arg1 [1:2] : (tensor<2xi32>) -> tensor<1xi32>
    %7 = stablehlo.reshape %6 : (tensor<1xi32>) -> tensor<i32>
    %8 = stablehlo.dynamic_slice %1, %7, sizes = [2048] : (tensor<4096xui16>, tensor<i32>) -> tensor<2048xui16>
    %9 = stablehlo.reshape %8 : (tensor<2048xui16>) -> tensor<1x16x128xui16>
    %10 = stablehlo.concatenate %5, %9, dim = 0 : (tensor<1x16x128xui16>, tensor<1x16x128xui16>) -> tensor<2x16x128xui16>
    %11 = "stablehlo.all_to_all"(%10) {split_dimension = 0 : i64, concat_dimension = 0 : i64, split_count = 2 : i64, replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>} : (tensor<2x16x128xui16>) -> tensor<2x16x128xui16>
    %12 = stablehlo.constant dense<0> : tensor<4096xui16>
    %13 = stablehlo.slice %arg2 [0:1] : (tensor<2xi32>) -> tensor<1xi32>
    %14 = stablehlo.reshape %13 : (tensor<1xi32>) -> tensor<i32>
    %15 = stablehlo.slice %11 [0:1, 0:16, 0:128] : (tensor<2x16x128xui16>) -> tensor<1x16x128xui16>
    %16 = stablehlo.reshape %15 : (tensor<1x16x128xui16>) -> tensor<2048xui16>
    %17 = stablehlo.dynamic_update_slice %12, %16, %14 : (tensor<4096xui16>, tensor<2048xui16>, tensor<i32>) -> tensor<4096xui16>
    %18 = stablehlo.slice %arg2 [1:2] : (tensor<2xi32>) -> tensor<1xi32>
    %19 = stablehlo.reshape %18 : (tensor<1xi32>) -> tensor<i32>
    %20 = stablehlo.slice %11 [1:2, 0:16, 0:128] : (tensor<2x16x128xui16>) -> tensor<1x16x128xui16>
    %21 = stablehlo.reshape %20 : (tensor<1x16x128xui16>) -> tensor<2048xui16>
    %22 = stablehlo.dynamic_update_slice %17, %21, %19 : (tensor<4096xui16>, tensor<2048xui16>, tensor<i32>) -> tensor<4096xui16>
    %23 = stablehlo.slice %22 [0:2048] : (tensor<4096xui16>) -> tensor<2048xui16>
    return %23 : tensor<2048xui16>
  }
}
