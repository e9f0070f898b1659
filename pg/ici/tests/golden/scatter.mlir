module @scatter attributes {mhlo.num_partitions = 1 : i32, mhlo.num_replicas = 3 : i32} {
  func.func public @main(%arg0: tensor<3x8x128xui32>) -> (tensor<1x8x128xui32>) {
    %0 = stablehlo.slice %arg0 [1:3, 0:8, 0:128] : (tensor<3x8x128xui32>) -> tensor<2x8x128xui32>
    %1 = stablehlo.slice %arg0 [0:1, 0:8, 0:128] : (tensor<3x8x128xui32>) -> tensor<1x8x128xui32>
    %2 = stablehlo.concatenate %0, %1, dim = 0 : (tensor<2x8x128xui32>, tensor<1x8x128xui32>) -> tensor<3x8x128xui32>
    %3 = stablehlo.constant dense<0> : tensor<1x8x128xui32>
    %4 = stablehlo.concatenate %2, %3, dim = 0 : (tensor<3x8x128xui32>, tensor<1x8x128xui32>) -> tensor<4x8x128xui32>
    %5 = stablehlo.slice %4 [0:2, 0:8, 0:128] : (tensor<4x8x128xui32>) -> tensor<2x8x128xui32>
    %6 = stablehlo.slice %4 [2:4, 0:8, 0:128] : (tensor<4x8x128xui32>) -> tensor<2x8x128xui32>
    %7 = "stablehlo.collective_permute"(%6) {source_target_pairs = dense<[[1, 0]]> : tensor<1x2xi64>} : (tensor<2x8x128xui32>) -> tensor<2x8x128xui32>
    %8 = stablehlo.replica_id : tensor<ui32>
    %9 = stablehlo.constant dense<[1, 0, 0]> : tensor<3xui32>
    %10 = stablehlo.dynamic_slice %9, %8, sizes = [1] : (tensor<3xui32>, tensor<ui32>) -> tensor<1xui32>
    %11 = stablehlo.reshape %10 : (tensor<1xui32>) -> tensor<ui32>
    %12 = stablehlo.constant dense<1> : tensor<ui32>
    %13 = stablehlo.compare EQ, %11, %12, UNSIGNED : (tensor<ui32>, tensor<ui32>) -> tensor<i1>
    %14 = stablehlo.broadcast_in_dim %13, dims = [] : (tensor<i1>) -> tensor<2x8x128xi1>
    %15 = stablehlo.select %14, %7, %5 : tensor<2x8x128xi1>, tensor<2x8x128xui32>
    %16 = stablehlo.slice %15 [0:1, 0:8, 0:128] : (tensor<2x8x128xui32>) -> tensor<1x8x128xui32>
    %17 = stablehlo.slice %15 [1:2, 0:8, 0:128] : (tensor<2x8x128xui32>) -> tensor<1x8x128xui32>
    %18 = "stablehlo.collective_permute"(%17) {source_target_pairs = dense<[[1, 2]]> : tensor<1x2xi64>} : (tensor<1x8x128xui32>) -> tensor<1x8x128xui32>
    %19 = stablehlo.replica_id : tensor<ui32>
    %20 = stablehlo.constant dense<[0, 0, 1]> : tensor<3xui32>
    %21 = stablehlo.dynamic_slice %20, %19, sizes = [1] : (tensor<3xui32>, tensor<ui32>) -> tensor<1xui32>
    %22 = stablehlo.reshape %21 : (tensor<1xui32>) -> tensor<ui32>
    %23 = stablehlo.constant dense<1> : tensor<ui32>
    %24 = stablehlo.compare EQ, %22, %23, UNSIGNED : (tensor<ui32>, tensor<ui32>) -> tensor<i1>
    %25 = stablehlo.broadcast_in_dim %24, dims = [] : (tensor<i1>) -> tensor<1x8x128xi1>
    %26 = stablehlo.select %25, %18, %16 : tensor<1x8x128xi1>, tensor<1x8x128xui32>
    return %26 : tensor<1x8x128xui32>
  }
}
